#include <cstdio>
#include <cstdlib>
#include <vector>
#include <algorithm>
#include <cmath>
#include <string>
#include "chip.cuh"
using namespace flashcell::cuda; using flashcell::Lstm; using flashcell::Sequence; using flashcell::ForwardParams; using flashcell::BackwardParams;
using C = Lstm; using IO = bf16;
constexpr int G=C::kGates,K=C::kStates,V=C::kSaved,R=C::kBias;
#define CK(x) do{auto e=(x); if(e!=cudaSuccess){printf("%s: %s\n",#x,cudaGetErrorString(e));exit(1);} }while(0)
__device__ float rnd(uint64_t i, uint32_t seed){uint64_t z=(i+1)*0x9E3779B97F4A7C15ull+seed*0xD1B54A32D192ED03ull; z^=z>>30; z*=0xBF58476D1CE4E5B9ull; z^=z>>27; z*=0x94D049BB133111EBull; z^=z>>31; return (float)(int)(z>>32)*(1.f/2147483648.f);}
template<class T> __global__ void fillr(T*p,size_t n,float s,uint32_t seed){for(size_t i=blockIdx.x*(size_t)blockDim.x+threadIdx.x;i<n;i+=(size_t)gridDim.x*blockDim.x)p[i]=from_float<T>(s*rnd(i,seed));}
template<class T> T* mk(size_t n,float s,uint32_t seed){T*p;CK(cudaMalloc(&p,n*sizeof(T)+64));fillr<T><<<1024,256>>>(p,n,s,seed);return p;}
template<class T> T* poison(size_t n){T*p;CK(cudaMalloc(&p,n*sizeof(T)+64));CK(cudaMemset(p,0xcb,n*sizeof(T)));return p;}
// teacher-forced reference of one step; states [K][S][N][D]
__device__ double err_max; 
__global__ void ref_fwd(ForwardParams p,int t,float*st,float*err){
  int64_t i=blockIdx.x*(int64_t)blockDim.x+threadIdx.x; if(i>=p.S*p.N*p.D)return;
  int64_t s=i/(p.N*p.D),n=i/p.D%p.N,j=i%p.D; Sequence q=p.sequences?p.sequences[s]:Sequence{s,s*p.T,s*p.x_batch,p.T,0};
  const IO*h=(const IO*)p.h; int64_t ND=p.N*p.D;
  if(t>=q.length){ if(t<q.length+q.padding){ float v=to_float(h[(q.row+t)*ND+n*p.D+j]); err[0*p.S*ND+i]=fmaxf(err[i],v!=v?9.f:fabsf(v)); } return;}
  float x[G],r[G],now[K],next[K],sv[V]; const IO*w=(const IO*)p.weight;
  for(int k=0;k<K;++k) now[k]= t? st[k*p.S*ND+i] : (p.initial?((const float*)p.initial)[(k*p.S+q.index)*ND+n*p.D+j]:0.f);
  for(int g=0;g<G;++g){ x[g]=to_float(((const IO*)p.x)[q.x_offset+t*p.x_time+g*p.x_gate+n*p.x_head+j])+(p.bias?((const float*)p.bias)[(g*p.N+n)*p.D+j]:0.f); float a=0; const IO*wr=w+((g*p.N+n)*p.D+j)*p.D;
    for(int d=0;d<p.D;++d){ float hv= t? to_float(h[(q.row+t-1)*ND+n*p.D+d]) : (p.initial?to_float(from_float<IO>(((const float*)p.initial)[q.index*ND+n*p.D+d])):0.f); a+=to_float(wr[d])*hv;} r[g]=a;}
  C::forward(x,r,now,next,sv); for(int k=0;k<K;++k)st[k*p.S*ND+i]=next[k];
  float e=fabsf(to_float(h[(q.row+t)*ND+n*p.D+j])-next[0]); if(!(e<9.f))e=9.f;
  if(p.saved) for(int v=0;v<V;++v){ float f=fabsf(to_float(((const IO*)p.saved)[((q.row+t)*V+v)*ND+n*p.D+j])-sv[v]); if(!(f<9.f))f=9.f; e=fmaxf(e,f);}
  if(p.h_prev){float f=fabsf(to_float(((const IO*)p.h_prev)[(q.row+t)*ND+n*p.D+j])-now[0]); if(!(f<9.f))f=9.f; e=fmaxf(e,f);}
  if(t==q.length-1) for(int k=0;k<K;++k){float f=fabsf(((float*)p.last)[(k*p.S+q.index)*ND+n*p.D+j]-next[k]); if(!(f<9.f))f=9.f; e=fmaxf(e,f);}
  err[i]=fmaxf(err[i],e);
}
__global__ void ref_bwd(BackwardParams p,int t,float*st,float*err,float*scale){
  int64_t i=blockIdx.x*(int64_t)blockDim.x+threadIdx.x; if(i>=p.S*p.N*p.D)return;
  int64_t s=i/(p.N*p.D),n=i/p.D%p.N,j=i%p.D; Sequence q=p.sequences?p.sequences[s]:Sequence{s,s*p.T,0,p.T,0}; int64_t ND=p.N*p.D;
  const IO*dr=(const IO*)p.dx;
  if(t>=q.length){ if(t<q.length+q.padding)for(int g=0;g<G;++g){float v=to_float(dr[((q.row+t)*G+g)*ND+n*p.D+j]); err[i]=fmaxf(err[i],v!=v?9.f:fabsf(v));} return;}
  float d[K],sv[V],dx[G],drr[G];
  bool first=t==q.length-1;
  for(int k=0;k<K;++k)d[k]=first?(p.dlast?((const float*)p.dlast)[(k*p.S+q.index)*ND+n*p.D+j]:0.f):st[k*p.S*ND+i];
  const IO*w=(const IO*)p.weight; float a=0;
  if(!first) for(int g=0;g<G;++g) for(int m=0;m<p.D;++m) a+=to_float(dr[((q.row+t+1)*G+g)*ND+n*p.D+m])*to_float(w[((g*p.N+n)*p.D+m)*p.D+j]);
  d[0]+=a+to_float(((const IO*)p.dh)[(q.row+t)*ND+n*p.D+j]);
  for(int v=0;v<V;++v)sv[v]=to_float(((const IO*)p.saved)[((q.row+t)*V+v)*ND+n*p.D+j]);
  C::backward(sv,d,dx,drr); for(int k=0;k<K;++k)st[k*p.S*ND+i]=d[k];
  float e=0; for(int g=0;g<G;++g){float got=to_float(dr[((q.row+t)*G+g)*ND+n*p.D+j]); float f=fabsf(got-drr[g]); if(!(f<99.f))f=99.f; e=fmaxf(e,f/fmaxf(fabsf(drr[g]),0.1f)); atomicAdd(&scale[(g*p.N+n)*p.D+j],dx[g]);}
  if(t==0&&p.dstate){ float pr=0; for(int g=0;g<G;++g) for(int m=0;m<p.D;++m) pr+=to_float(dr[((q.row)*G+g)*ND+n*p.D+m])*to_float(w[((g*p.N+n)*p.D+m)*p.D+j]);
    for(int k=0;k<K;++k){float want=d[k]+(k==0?pr:0); float f=fabsf(((float*)p.dstate)[(k*p.S+q.index)*ND+n*p.D+j]-want); if(!(f<99.f))f=99.f; e=fmaxf(e,f);}}
  err[i]=fmaxf(err[i],e);
}
static float mx(float*d,size_t n){std::vector<float>v(n);CK(cudaMemcpy(v.data(),d,n*4,cudaMemcpyDeviceToHost));float m=0;for(float x:v)m=std::max(m,x);return m;}
int main(int argc,char**argv){
  bool one=argc>1&&std::string(argv[1])=="check1"; bool check=one||(argc>1&&std::string(argv[1])=="check"); Device dev{}; cudaDeviceProp pr; CK(cudaGetDeviceProperties(&pr,0)); dev={90,pr.multiProcessorCount,(int)pr.sharedMemPerBlockOptin};
  struct Sz{int B,N,D,T; bool ragged,init;}; std::vector<Sz> szs;
  if(check) szs={{16,1,768,9,0,1},{24,1,768,9,0,0},{33,1,768,7,1,1},{64,1,768,9,1,1},{100,1,768,6,0,1},{128,1,768,12,1,0},{200,1,768,5,1,1},{64,3,256,6,1,1},{32,1,768,33,0,0}};
  if(one) szs={{64,1,768,5,1,1}};
  if(!check&&argc>2) szs={{atoi(argv[2]),atoi(argv[3]),atoi(argv[4]),argc>5?atoi(argv[5]):1024,0,0}};
  for(auto z:szs){ int64_t S=z.B,N=z.N,D=z.D,T=z.T,ND=N*D;
    IO*x=mk<IO>(S*T*G*ND,1.f,1),*w=mk<IO>(G*ND*D,1.f/sqrtf(D),2),*dh=mk<IO>(S*T*ND,1.f,3); float*bias=mk<float>(R*ND,.3f,4),*init=mk<float>(K*S*ND,.7f,5),*dlast=mk<float>(K*S*ND,.5f,6);
    IO*h=poison<IO>(S*T*ND),*hp=poison<IO>(S*T*ND),*sv=poison<IO>(S*T*V*ND),*dx=poison<IO>(S*T*G*ND),*scr=poison<IO>(S*ND); float*last=poison<float>(K*S*ND),*dst=poison<float>(K*S*ND),*part=poison<float>((S+7)/8*R*ND);
    Sequence*tab=nullptr; if(z.ragged){std::vector<Sequence>q;for(int s=0;s<S;++s){int64_t l=T-s*T/S; if(s==S-1)l=0; q.push_back({(s*7+3)%S,((s*7+3)%S)*T,((s*7+3)%S)*T*G*ND,l,T-l});} bool perm=std::__gcd(7,(int)S)==1; if(!perm)for(int s=0;s<S;++s)q[s]={s,s*T,s*T*G*ND,q[s].length,q[s].padding}; CK(cudaMalloc(&tab,S*sizeof(Sequence)));CK(cudaMemcpy(tab,q.data(),S*sizeof(Sequence),cudaMemcpyHostToDevice));}
    ForwardParams f{}; f.S=S;f.N=N;f.D=D;f.T=T;f.sequences=tab;f.weight=w;f.x=x;f.x_batch=T*G*ND;f.x_time=G*ND;f.x_gate=ND;f.x_head=D;f.bias=bias;f.initial=z.init?init:nullptr;f.h=h;f.last=last;f.saved=sv;f.h_prev=hp;
    BackwardParams b{}; b.S=S;b.N=N;b.D=D;b.T=T;b.sequences=tab;b.weight=w;b.dh=dh;b.dlast=z.init?dlast:nullptr;b.saved=sv;b.grad_clip=INFINITY;b.dx=dx;b.dr=nullptr;b.dbias_partial=part;b.dstate=dst;
    cudaStream_t st; CK(cudaStreamCreate(&st)); Launch L{dev,st,false,Engine::kChip,8,scr};
    CK(cudaDeviceSynchronize());
    if(check){
      forward_chip<C,IO>(f,L); CK(cudaDeviceSynchronize()); try{backward_chip<C,IO>(b,L);}catch(...){} CK(cudaDeviceSynchronize());
      float*s1,*e1,*e2,*bs; CK(cudaMalloc(&s1,K*S*ND*4));CK(cudaMalloc(&e1,S*ND*4));CK(cudaMalloc(&e2,S*ND*4));CK(cudaMalloc(&bs,R*ND*4));CK(cudaMemset(e1,0,S*ND*4));CK(cudaMemset(e2,0,S*ND*4));CK(cudaMemset(bs,0,R*ND*4));
      for(int t=0;t<T;++t)ref_fwd<<<(S*ND+127)/128,128>>>(f,t,s1,e1); for(int t=T-1;t>=0;--t)ref_bwd<<<(S*ND+127)/128,128>>>(b,t,s1,e2,bs); CK(cudaDeviceSynchronize());
      std::vector<float>pp((S+7)/8*R*ND),bb(R*ND);CK(cudaMemcpy(pp.data(),part,pp.size()*4,cudaMemcpyDeviceToHost));CK(cudaMemcpy(bb.data(),bs,bb.size()*4,cudaMemcpyDeviceToHost)); float eb=0,sb=0; for(int64_t i=0;i<R*ND;++i){double a=0;for(int64_t k=0;k<(S+7)/8;++k)a+=pp[k*R*ND+i]; float d=fabs(a-bb[i]); if(!(d<1e9))d=1e9; eb=std::max(eb,d); sb=std::max(sb,fabsf(bb[i]));}
      float a=mx(e1,S*ND),c=mx(e2,S*ND); printf("check B%d %dx%d T%d ragged%d init%d: fwd %.4f bwd %.4f dbias %.4f of %.1f %s\n",z.B,z.N,z.D,z.T,z.ragged,z.init,a,c,eb,sb,(a<0.02&&c<0.03&&eb<0.02f*sb+.05f)?"ok":"FAIL");
      // determinism
      std::vector<uint16_t> h1(S*T*ND),h2(S*T*ND),g1(S*T*G*ND),g2(S*T*G*ND); CK(cudaMemcpy(h1.data(),h,h1.size()*2,cudaMemcpyDeviceToHost));CK(cudaMemcpy(g1.data(),dx,g1.size()*2,cudaMemcpyDeviceToHost));
      for(int r=0;r<20;++r){forward_chip<C,IO>(f,L);try{backward_chip<C,IO>(b,L);}catch(...){}} CK(cudaDeviceSynchronize()); CK(cudaMemcpy(h2.data(),h,h1.size()*2,cudaMemcpyDeviceToHost));CK(cudaMemcpy(g2.data(),dx,g1.size()*2,cudaMemcpyDeviceToHost)); if(h1!=h2||g1!=g2)printf("  BITS DIFFER\n");
    } else {
      auto time=[&](auto fn){ cudaEvent_t a,c;CK(cudaEventCreate(&a));CK(cudaEventCreate(&c)); for(int i=0;i<3;++i)fn(); std::vector<float>v; for(int i=0;i<21;++i){CK(cudaEventRecord(a,st));fn();CK(cudaEventRecord(c,st));CK(cudaEventSynchronize(c));float ms;CK(cudaEventElapsedTime(&ms,a,c));v.push_back(ms);} std::sort(v.begin(),v.end());return v[10]*1e3f/T;};
      ForwardParams fi=f; fi.saved=nullptr;fi.h_prev=nullptr;
      float a=time([&]{forward_chip<C,IO>(fi,L);}),s=time([&]{forward_chip<C,IO>(f,L);}),c=0; try{c=time([&]{backward_chip<C,IO>(b,L);});}catch(...){}
      printf("B%-4d %dx%-5d us/step fwd %.3f saving %.3f bwd %.3f\n",z.B,z.N,z.D,a,s,c);
    }
    fflush(stdout);
    for(void*q:{(void*)x,(void*)w,(void*)dh,(void*)bias,(void*)init,(void*)dlast,(void*)h,(void*)hp,(void*)sv,(void*)dx,(void*)scr,(void*)last,(void*)dst,(void*)part})CK(cudaFree(q));
  }
}
