// Values against a double reference, and times against the chip engine.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cmath>
#include <vector>
#include <string>
#include <random>
#include "cluster.cuh"
#ifdef WITH_CHIP
#include "chip.cuh"
#endif
namespace flashcell::cuda {
#ifndef CELLS
#define CELLS Lstm
#endif
template <typename T> struct Dev { T* p; size_t n; Dev(size_t n):n(n){ cudaMalloc(&p, n*sizeof(T)+16); cudaMemset(p, 0xff, n*sizeof(T)+16);} ~Dev(){cudaFree(p);} 
  void put(const std::vector<T>& v){cudaMemcpy(p,v.data(),n*sizeof(T),cudaMemcpyHostToDevice);} std::vector<T> get(){std::vector<T> v(n); cudaMemcpy(v.data(),p,n*sizeof(T),cudaMemcpyDeviceToHost); return v;} };
template <typename IO> double dbl(IO x){return (double)(float)x;}
template <typename IO> IO rnd(double x){ if constexpr(std::is_same_v<IO,bf16>) return __float2bfloat16((float)x); else return __float2half((float)x);}
Device device;
template <typename IO> const char* io_name() { return std::is_same<IO,bf16>::value ? "bf16" : "fp16"; }
template <typename Cell, typename IO>
struct Call {
  static constexpr int G=Cell::kGates,K=Cell::kStates,R=Cell::kBias,V=Cell::kSaved;
  int64_t S,T,N,D; bool masks;
  Dev<IO> x,w,h,hprev,saved,dh,dx,dr; Dev<float> bias,init,last,dlast,dstate,partial; Dev<uint8_t> reset,hold; Dev<Sequence> seq;
  std::vector<IO> hx,hw,hdh; std::vector<float> hb,hi,hd; std::vector<uint8_t> hr,hh; std::vector<Sequence> hs;
  ForwardParams f{}; BackwardParams b{};
  Call(int64_t S,int64_t T,int64_t N,int64_t D,bool masks,double clip=INFINITY):S(S),T(T),N(N),D(D),masks(masks),x(S*T*G*N*D),w(G*N*D*D),h(S*T*N*D),hprev(S*T*N*D),saved(S*T*V*N*D),dh(S*T*N*D),dx(S*T*G*N*D),dr(S*T*G*N*D),bias(R*N*D),init(K*S*N*D),last(K*S*N*D),dlast(K*S*N*D),dstate(K*S*N*D),partial((S+3)/4*R*N*D),reset(S*T),hold(S*T),seq(S){
    std::mt19937 g(1); std::normal_distribution<float> nd; auto fill=[&](auto& v,size_t n,float s){v.resize(n); for(auto&e:v) e=rnd2(e,nd(g)*s);};
    fill(hx,x.n,1); fill(hw,w.n,1.0f/sqrtf(D)); fill(hdh,dh.n,0.5f); fill(hb,bias.n,0.3f); fill(hi,init.n,0.5f); fill(hd,dlast.n,0.5f);
    if(K==4) for(size_t i=2*S*N*D;i<3*S*N*D;++i) hi[i]=fabsf(hi[i])+0.5f;
    hr.resize(S*T); hh.resize(S*T); for(auto&e:hr)e=g()%9==0; for(auto&e:hh)e=g()%7==0;
    hs.resize(S); for(int64_t s=0;s<S;++s){int64_t len = masks? (s==2?0:1+g()%T):T; if(s==0)len=T; hs[s]={s,s*T,s*T*G*N*D,len,T-len};}
    x.put(hx);w.put(hw);dh.put(hdh);bias.put(hb);init.put(hi);dlast.put(hd);reset.put(hr);hold.put(hh);seq.put(hs);
    SequenceParams q{S,N,D,T,masks?seq.p:nullptr,masks?reset.p:nullptr,masks?hold.p:nullptr,w.p};
    (SequenceParams&)f=q; (SequenceParams&)b=q;
    f.x=x.p;f.x_batch=T*G*N*D;f.x_time=G*N*D;f.x_gate=N*D;f.x_head=D;f.bias=bias.p;f.initial=init.p;f.h=h.p;f.last=last.p;f.saved=saved.p;f.h_prev=hprev.p;
    b.dh=dh.p;b.dlast=dlast.p;b.saved=saved.p;b.grad_clip=clip;b.dx=dx.p;b.dr=Cell::kSplitGrad?dr.p:nullptr;b.dbias_partial=partial.p;b.dstate=dstate.p;
  }
  static float rnd2(float&,float v){return v;} static IO rnd2(IO&,float v){return rnd<IO>(v);}
  struct Out{std::vector<double> h,last,hprev,dx,dr,dstate,db; std::vector<uint8_t> raw;};
  Out fetch(int tile){ Out o; auto c=[&](auto v){std::vector<double> r(v.size()); for(size_t i=0;i<v.size();++i){r[i]=(double)(float)v[i];} const uint8_t*q=(const uint8_t*)v.data(); o.raw.insert(o.raw.end(),q,q+v.size()*sizeof(v[0])); return r;};
    o.h=c(h.get());o.last=c(last.get());o.hprev=c(hprev.get());o.dx=c(dx.get()); if(Cell::kSplitGrad)o.dr=c(dr.get()); o.dstate=c(dstate.get()); auto pt=partial.get(); o.db.assign(R*N*D,0); for(int64_t t=0;t<(S+tile-1)/tile;++t)for(int64_t i=0;i<R*N*D;++i)o.db[i]+=pt[t*R*N*D+i]; return o; }
  Out reference(){ Out o; o.h.assign(h.n,0);o.hprev.assign(h.n,0);o.last.assign(last.n,0);o.dx.assign(dx.n,0);if(Cell::kSplitGrad)o.dr.assign(dx.n,0);o.dstate.assign(last.n,0);o.db.assign(R*N*D,0);
    int64_t ND=N*D; 
    for(int64_t s=0;s<S;++s)for(int64_t n=0;n<N;++n){ std::vector<double> st(K*D); for(int k=0;k<K;++k)for(int64_t d=0;d<D;++d)st[k*D+d]=hi[(k*S+s)*ND+n*D+d];
      std::vector<double> sv(T*V*D,0); int64_t L=hs[s].length;
      for(int64_t t=0;t<L;++t){ bool rs=masks&&hr[s*T+t],ho=masks&&hh[s*T+t]; if(rs) for(auto&e:st)e=0; if(ho)continue; std::vector<double> nx=st; 
        std::vector<double> rr(G*D); for(int g=0;g<G;++g)for(int64_t d=0;d<D;++d){double a=0; const IO*wr=&hw[((g*N+n)*D+d)*D]; for(int64_t k=0;k<D;++k)a+=dbl(wr[k])*st[k]; rr[g*D+d]=a;}
        for(int64_t d=0;d<D;++d){ double X[G],Rr[G],Sx[K],Nx[K],Sv[V]; for(int g=0;g<G;++g){X[g]=dbl(hx[((s*T+t)*G+g)*ND+n*D+d])+hb[g*ND+n*D+d];Rr[g]=rr[g*D+d];} if(R>G)Rr[G-1]+=hb[(R-1)*ND+n*D+d]; for(int k=0;k<K;++k)Sx[k]=st[k*D+d]; Cell::forward(X,Rr,Sx,Nx,Sv); for(int k=0;k<K;++k)nx[k*D+d]=Nx[k]; for(int v=0;v<V;++v)sv[(t*V+v)*D+d]=Sv[v]; o.h[(s*T+t)*ND+n*D+d]=Nx[0]; o.hprev[(s*T+t)*ND+n*D+d]=Sx[0]; }
        st=nx; }
      for(int k=0;k<K;++k)for(int64_t d=0;d<D;++d)o.last[(k*S+s)*ND+n*D+d]=st[k*D+d];
      std::vector<double> ds(K*D,0); for(int k=0;k<Cell::kGradStates;++k)for(int64_t d=0;d<D;++d)ds[k*D+d]=hd[(k*S+s)*ND+n*D+d];
      for(int64_t t=L-1;t>=0;--t){ bool rs=masks&&hr[s*T+t],ho=masks&&hh[s*T+t]; if(!ho){ std::vector<double> drr(G*D);
          for(int64_t d=0;d<D;++d){ double Sv[V],Ds[K],Dx[G],Dr[G]; for(int v=0;v<V;++v)Sv[v]=sv[(t*V+v)*D+d]; for(int k=0;k<K;++k)Ds[k]=ds[k*D+d]; Ds[0]+=dbl(hdh[(s*T+t)*ND+n*D+d]); Cell::backward(Sv,Ds,Dx,Dr); for(int k=0;k<K;++k)ds[k*D+d]=Ds[k]; for(int g=0;g<G;++g){drr[g*D+d]=Dr[g]; o.dx[((s*T+t)*G+g)*ND+n*D+d]=Dx[g]; if(Cell::kSplitGrad)o.dr[((s*T+t)*G+g)*ND+n*D+d]=Dr[g]; o.db[g*ND+n*D+d]+=Dx[g];} if(R>G)o.db[(R-1)*ND+n*D+d]+=Dr[G-1]; }
          std::vector<double> pr(D,0); for(int g=0;g<G;++g)for(int64_t d=0;d<D;++d){const IO*wr=&hw[((g*N+n)*D+d)*D]; double e=drr[g*D+d]; for(int64_t k=0;k<D;++k)pr[k]+=e*dbl(wr[k]);}
          for(int64_t k=0;k<D;++k){double c=b.grad_clip; ds[k]+=pr[k]>c?c:pr[k]<-c?-c:pr[k];} }
        if(rs) for(auto&e:ds)e=0; }
      for(int k=0;k<Cell::kGradStates;++k)for(int64_t d=0;d<D;++d)o.dstate[(k*S+s)*ND+n*D+d]=ds[k*D+d];
    } return o; }
};
double diff(const std::vector<double>&a,const std::vector<double>&b){ double e=0,m=0; for(size_t i=0;i<a.size();++i){double d=fabs(a[i]-b[i]); if(!(d<=1e30))return NAN; e+=d*d; m+=b[i]*b[i];} return a.empty()?0:sqrt(e/(m+1e-30)); }
template <typename F> float timed(F f,int n=25){ cudaEvent_t a,b; cudaEventCreate(&a);cudaEventCreate(&b); for(int i=0;i<3;++i)f(); std::vector<float> t; for(int i=0;i<n;++i){cudaEventRecord(a);f();cudaEventRecord(b);cudaEventSynchronize(b);float ms;cudaEventElapsedTime(&ms,a,b);t.push_back(ms);} std::sort(t.begin(),t.end()); return t[n/2]; }
void ok(const char*w){ cudaError_t e=cudaDeviceSynchronize(); if(e==cudaSuccess)e=cudaGetLastError(); if(e){printf("%s: %s\n",w,cudaGetErrorString(e));exit(1);} }
template <typename Cell,typename IO> void check_values(int64_t S,int64_t T,int64_t N,int64_t D,bool masks,int tile,double clip=INFINITY){
  Call<Cell,IO> c(S,T,N,D,masks,clip); Launch l{device,nullptr,false,Engine(0),tile,nullptr};
  forward_cluster<Cell,IO>(c.f,l); ok("fwd"); backward_cluster<Cell,IO>(c.b,l); ok("bwd"); auto o=c.fetch(tile);
  forward_cluster<Cell,IO>(c.f,l); backward_cluster<Cell,IO>(c.b,l); ok("again"); auto o2=c.fetch(tile); bool same=o.raw==o2.raw;
  auto r=c.reference();
  printf("%-9s %s S%ld T%ld %ldx%ld masks%d tile%d  h %.1e last %.1e hprev %.1e dx %.1e dr %.1e dstate %.1e db %.1e %s\n",Cell::kName,io_name<IO>(),S,T,N,D,masks,tile,diff(o.h,r.h),diff(o.last,r.last),diff(o.hprev,r.hprev),diff(o.dx,r.dx),diff(o.dr,r.dr),diff(o.dstate,r.dstate),diff(o.db,r.db),same?"same bits":"DIFFERENT BITS"); fflush(stdout);
#ifdef WITH_CHIP
  if(getenv("CHIPREF")){ Launch k{device,nullptr,false,Engine::kChip,8,nullptr}; forward_chip<Cell,IO>(c.f,k); backward_chip<Cell,IO>(c.b,k); ok("chip"); auto o=c.fetch(8);
  printf("   chip                                      h %.1e last %.1e hprev %.1e dx %.1e dr %.1e dstate %.1e db %.1e\n",diff(o.h,r.h),diff(o.last,r.last),diff(o.hprev,r.hprev),diff(o.dx,r.dx),diff(o.dr,r.dr),diff(o.dstate,r.dstate),diff(o.db,r.db)); }
#endif
}
template <typename Cell,typename IO> void options(int64_t S,int64_t T,int64_t N,int64_t D,int tile){ Call<Cell,IO> c(S,T,N,D,true); Launch l{device,nullptr,false,Engine(0),tile,nullptr};
 forward_cluster<Cell,IO>(c.f,l); ok("f"); auto h=c.h.get(); auto last=c.last.get(); cudaMemset(c.h.p,0xff,c.h.n*sizeof(IO)); cudaMemset(c.last.p,0xff,c.last.n*4); auto inf=c.f; inf.saved=nullptr; inf.h_prev=nullptr; forward_cluster<Cell,IO>(inf,l); ok("i"); auto h2=c.h.get(); auto last2=c.last.get(); bool a=!memcmp(h.data(),h2.data(),h.size()*sizeof(IO))&&!memcmp(last.data(),last2.data(),last.size()*4);
 for(auto&e:c.hi)e=0; for(auto&e:c.hb)e=0; for(auto&e:c.hd)e=0; c.init.put(c.hi);c.bias.put(c.hb);c.dlast.put(c.hd); forward_cluster<Cell,IO>(c.f,l); backward_cluster<Cell,IO>(c.b,l); ok("z"); auto o=c.fetch(tile).raw; c.f.initial=nullptr;c.f.bias=nullptr;c.b.dlast=nullptr; forward_cluster<Cell,IO>(c.f,l); backward_cluster<Cell,IO>(c.b,l); ok("n"); printf("options %s %ldx%ld tile%d: inference %s, nulls %s\n",Cell::kName,N,D,tile,a?"same":"DIFFER",o==c.fetch(tile).raw?"same":"DIFFER"); }
template <typename Cell,typename IO> void time_it(int64_t S,int64_t T,int64_t N,int64_t D,bool masks=false){
  Call<Cell,IO> c(S,T,N,D,masks); printf("%s %s%s B%ld T%ld %ldx%ld:",Cell::kName,io_name<IO>(),masks?" ragged":"",S,T,N,D);
  auto inf=c.f; inf.saved=nullptr; inf.h_prev=nullptr;
  for(int tile:{4,8}){ Launch l{device,nullptr,false,Engine(0),tile,nullptr}; float i=timed([&]{forward_cluster<Cell,IO>(inf,l);}); float f=timed([&]{forward_cluster<Cell,IO>(c.f,l);}); float b=timed([&]{backward_cluster<Cell,IO>(c.b,l);}); ok("time"); printf("  tile%d inf %.3f fwd %.3f bwd %.3f",tile,i,f,b); fflush(stdout);}
#ifdef WITH_CHIP
  { Launch l{device,nullptr,false,Engine::kChip,8,nullptr}; float i=timed([&]{forward_chip<Cell,IO>(inf,l);}); float f=timed([&]{forward_chip<Cell,IO>(c.f,l);}); float b=timed([&]{backward_chip<Cell,IO>(c.b,l);}); ok("time"); printf("  chip inf %.3f fwd %.3f bwd %.3f",i,f,b); }
#endif
  printf(" ms\n"); fflush(stdout);
}
__global__ void noise(float* x,int n){ float a=threadIdx.x; for(int i=0;i<n;++i)a=a*1.0001f+0.5f; if(a==-1)*x=a; }
template <typename Cell,typename IO> void stress(int64_t S,int64_t T,int64_t N,int64_t D,int tile){ Call<Cell,IO> c(S,T,N,D,false); Launch l{device,nullptr,false,Engine(0),tile,nullptr}; cudaStream_t s1,s2; cudaStreamCreateWithFlags(&s1,cudaStreamNonBlocking);cudaStreamCreateWithFlags(&s2,cudaStreamNonBlocking); l.stream=s1; Dev<float> z(4);
 std::vector<uint8_t> first; int differ=0; for(int i=0;i<5000;++i){ if(i%7==0) noise<<<40+i%200,256,0,s2>>>(z.p,2000+i); forward_cluster<Cell,IO>(c.f,l); backward_cluster<Cell,IO>(c.b,l); if(i%50==0){ cudaStreamSynchronize(s1); auto o=c.fetch(tile).raw; if(first.empty())first=o; differ+=o!=first; } } ok("stress"); printf("stress %ldx%ld B%ld tile%d: 5000 launches, %d differ\n",N,D,S,tile,differ); }
int go(int argc,char**argv){
  int sm,sh; cudaDeviceGetAttribute(&sm,cudaDevAttrMultiProcessorCount,0); cudaDeviceGetAttribute(&sh,cudaDevAttrMaxSharedMemoryPerBlockOptin,0); device={90,sm,sh};
  std::string m=argc>1?argv[1]:"check";
  if(m=="check"){ for(int tile:{4,8}){ check_values<CELLS,bf16>(5,7,2,144,false,tile); check_values<CELLS,bf16>(11,9,2,256,true,tile); check_values<CELLS,fp16>(9,8,1,200,true,tile,0.05); 
#ifndef SMALL
   check_values<CELLS,fp16>(3,6,2,512,true,tile); check_values<CELLS,bf16>(9,5,1,320,false,tile);
#endif
   } }
  if(m=="tiny"){ for(int tile:{4,8}){ check_values<CELLS,bf16>(5,5,2,144,true,tile);
#ifndef SMALL
   check_values<CELLS,bf16>(3,4,1,320,true,tile);
#endif
 } }
  if(m=="stress"){ stress<CELLS,bf16>(9,6,3,256,8); stress<CELLS,bf16>(9,6,3,256,4); stress<CELLS,bf16>(20,5,4,512,8); }
  if(m=="more") for(int tile:{4,8}){ check_values<CELLS,bf16>(5,7,2,16,true,tile); check_values<CELLS,fp16>(6,5,2,64,true,tile); check_values<CELLS,bf16>(9,6,1,136,true,tile); check_values<CELLS,bf16>(1,6,3,128,false,tile); check_values<CELLS,bf16>(17,9,1,200,true,tile); check_values<CELLS,bf16>(5,8,3,264,true,tile,0.03); options<CELLS,bf16>(9,7,2,256,tile); options<CELLS,fp16>(9,7,1,480,tile); }
  if(m=="ragged") for(int i=2;i+3<argc;i+=4) time_it<CELLS,bf16>(atoi(argv[i]),atoi(argv[i+1]),atoi(argv[i+2]),atoi(argv[i+3]),true);
  if(m=="time") for(int i=2;i+3<argc;i+=4) time_it<CELLS,bf16>(atoi(argv[i]),atoi(argv[i+1]),atoi(argv[i+2]),atoi(argv[i+3]));
 return 0; }
}
int main(int argc,char**argv){ return flashcell::cuda::go(argc,argv); }
