#pragma once
#include "walk.cuh"
#include "shoot.cuh"
#include "scan.cuh"
#include "adjoint.cuh"
#include <cstdio>
#include <cstdlib>
#include <cmath>
#include <vector>
#include <algorithm>
#include <string>
#include <functional>
namespace flashcell::cuda {
#define CK(x) do{cudaError_t e_=(x); if(e_!=cudaSuccess){printf("CUDA %s at %s:%d\n",cudaGetErrorString(e_),__FILE__,__LINE__);exit(1);}}while(0)
static char* pool=nullptr; static size_t pool_at=0, pool_size=0;
static void* get(size_t n){ n=(n+255)/256*256; if(pool_at+n>pool_size){printf("pool\n");exit(1);} void*p=pool+pool_at; pool_at+=n; return p; }
__device__ inline uint32_t mix(uint64_t z){ z=(z^(z>>30))*0xbf58476d1ce4e5b9ull; z=(z^(z>>27))*0x94d049bb133111ebull; return uint32_t((z^(z>>31))>>16); }
__device__ inline float gauss(uint64_t i,uint64_t seed){ float u=(mix(i*2+seed*0x9e3779b97f4a7c15ull)+1.0f)*2.3283064e-10f, v=mix(i*2+1+seed*0x9e3779b97f4a7c15ull)*2.3283064e-10f; return sqrtf(-2*logf(u))*cospif(2*v); }
template<class IO> __global__ void fill(IO* p,int64_t n,float std,uint64_t seed){ for(int64_t i=blockIdx.x*256ll+threadIdx.x;i<n;i+=gridDim.x*256ll) p[i]=from_float<IO>(std*gauss(i,seed)); }
template<class IO> __global__ void shift(IO* x,int64_t n,int D,int row,float by){ for(int64_t i=blockIdx.x*256ll+threadIdx.x;i<n;i+=gridDim.x*256ll) if((i/D)%3==row) x[i]=from_float<IO>(to_float(x[i])+by); }
template<class IO> __global__ void clampk(IO* p,int64_t n,float b){ for(int64_t i=blockIdx.x*256ll+threadIdx.x;i<n;i+=gridDim.x*256ll) p[i]=from_float<IO>(fminf(b,fmaxf(-b,to_float(p[i])))); }
template<class IO> __global__ void uniform(IO* p,int64_t n,float lo,float hi,uint64_t seed){ for(int64_t i=blockIdx.x*256ll+threadIdx.x;i<n;i+=gridDim.x*256ll) p[i]=from_float<IO>(lo+(hi-lo)*mix(i+seed*0x9e3779b97f4a7c15ull)*2.3283064e-10f); }
// float64 loop
template<class Cell,class IO> __global__ void ref_fwd(ForwardParams p,double* h,double* states){ int64_t i=blockIdx.x*64ll+threadIdx.x; if(i>=p.S*p.D) return; int64_t s=i/p.D,d=i%p.D;
  double w[Cell::kWeights],st[Cell::kStates]; for(int q=0;q<Cell::kWeights;++q) w[q]=((const float*)p.weight)[q*p.D+d]; for(int k=0;k<Cell::kStates;++k) st[k]=p.initial?((const float*)p.initial)[(k*p.S+s)*p.D+d]:0;
  for(int64_t t=0;t<p.T;++t){ if(p.reset&&p.reset[s*p.T+t]) for(int k=0;k<Cell::kStates;++k) st[k]=0; bool held=p.hold&&p.hold[s*p.T+t]; double x[3],n[Cell::kStates]; for(int g=0;g<3;++g) x[g]=to_float(((const IO*)p.x)[s*p.x_batch+t*p.x_time+g*p.x_gate+d]); Cell::forward(x,w,st,n); if(!held) for(int k=0;k<Cell::kStates;++k) st[k]=n[k]; h[(s*p.T+t)*p.D+d]=held?0:st[0]; for(int k=0;states&&k<Cell::kStates;++k) states[((s*p.T+t)*Cell::kStates+k)*p.D+d]=st[k]; } }
// from the saved (rounded) states, as the op defines it
template<class Cell,class IO> __global__ void ref_bwd(BackwardParams p,double* dx,double* dw,double* dstate){ int64_t i=blockIdx.x*64ll+threadIdx.x; if(i>=p.S*p.D) return; int64_t s=i/p.D,d=i%p.D; constexpr int K=Cell::kStates,P=Cell::kWeights;
  double w[P],c[K],sum[P]={}; for(int q=0;q<P;++q) w[q]=((const float*)p.weight)[q*p.D+d]; for(int k=0;k<K;++k) c[k]=p.dlast?((const float*)p.dlast)[(k*p.S+s)*p.D+d]:0;
  for(int64_t t=p.T-1;t>=0;--t){ bool reset=p.reset&&p.reset[s*p.T+t],held=p.hold&&p.hold[s*p.T+t]; double x[3],st[K],g[3]={}; int64_t row=s*p.T+t; for(int j=0;j<3;++j) x[j]=to_float(((const IO*)p.x)[s*p.x_batch+t*p.x_time+j*p.x_gate+d]);
    for(int k=0;k<K;++k){ if(reset) st[k]=0; else if(t==0) st[k]=p.initial?((const float*)p.initial)[(k*p.S+s)*p.D+d]:0; else if(k==0&&!p.hold) st[k]=to_float(((const IO*)p.h)[(row-1)*p.D+d]); else st[k]=to_float(((const IO*)p.saved)[((row-1)*p.V+(k==0?K-1:k-1))*p.D+d]); }
    if(!held){ c[0]+=to_float(((const IO*)p.dh)[row*p.D+d]); Cell::backward(x,w,st,c,g,sum); } if(reset) for(int k=0;k<K;++k) c[k]=0; for(int j=0;j<3;++j) dx[(row*3+j)*p.D+d]=g[j]; }
  for(int q=0;q<P;++q) atomicAdd(&dw[q*p.D+d],sum[q]); for(int k=0;k<K;++k) dstate[(k*p.S+s)*p.D+d]=c[k]; }
template<class IO> __global__ void maxdiff(const IO* a,const double* b,int64_t n,double* out){ double m=0; for(int64_t i=blockIdx.x*256ll+threadIdx.x;i<n;i+=gridDim.x*256ll){ double e=fabs((double)to_float(a[i])-b[i]); if(!(e<=m)) m=isnan(e)?1e30:e; } for(int o=16;o;o/=2) m=fmax(m,__shfl_xor_sync(~0u,m,o)); if(threadIdx.x%32==0) atomicMax((unsigned long long*)out,__double_as_longlong(m)); }
template<class IO> static double err(const IO* a,const double* b,int64_t n){ static double* o=nullptr; if(!o) CK(cudaMalloc(&o,8)); CK(cudaMemset(o,0,8)); maxdiff<<<512,256>>>(a,b,n,o); double r; CK(cudaMemcpy(&r,o,8,cudaMemcpyDeviceToHost)); return r; }
static cudaStream_t st;
static float timed(const std::function<void()>& f,int reps=20){ f(); f(); f(); cudaEvent_t a,b; cudaEventCreate(&a); cudaEventCreate(&b); std::vector<float> v; for(int i=0;i<reps;++i){ cudaEventRecord(a,st); f(); cudaEventRecord(b,st); cudaEventSynchronize(b); float t; cudaEventElapsedTime(&t,a,b); v.push_back(t);} CK(cudaGetLastError()); std::sort(v.begin(),v.end()); return v[v.size()/2]; }
static float graphed(const std::function<void()>& f,int n=20){ cudaGraph_t g; cudaGraphExec_t e; CK(cudaStreamBeginCapture(st,cudaStreamCaptureModeRelaxed)); for(int i=0;i<n;++i) f(); CK(cudaStreamEndCapture(st,&g)); CK(cudaGraphInstantiate(&e,g,0)); float t=timed([&]{cudaGraphLaunch(e,st);},10)/n; cudaGraphExecDestroy(e); cudaGraphDestroy(g); return t; }
template<class K,class... A> static void launch(K k,unsigned grid,int threads,size_t shared,bool pdl,A... args){ CK(cudaFuncSetAttribute(k,cudaFuncAttributeMaxDynamicSharedMemorySize,(int)shared)); cudaLaunchConfig_t c={}; c.gridDim=grid; c.blockDim=threads; c.dynamicSmemBytes=shared; c.stream=st; cudaLaunchAttribute at[1]; at[0].id=cudaLaunchAttributeProgrammaticStreamSerialization; at[0].val.programmaticStreamSerializationAllowed=1; c.attrs=at; c.numAttrs=pdl?1:0; CK(cudaLaunchKernelEx(&c,k,args...)); }
template<class Tr> static void run_walk(const ForwardParams& p){ int rows=int((p.D+Tr::kThreads*Tr::kN-1)/(Tr::kThreads*Tr::kN)); launch(walk_kernel<Tr>,unsigned(p.S*rows),Tr::kThreads,Tr::Steps::kBytes,false,p,rows); }
template<class Tr,class Ts> static void run_shoot(const ForwardParams& p,int chunk,int burn,int cap,float tol,int passes,float* scratch,bool pdl=true){ Shoot s{}; s.chunk=chunk; s.chunks=int((p.T+chunk-1)/chunk); s.burn_in=burn; s.longest_burn_in=cap; s.passes=passes; s.tol=tol; constexpr int K=Tr::kStates; s.blocks_of_row=int((p.D+Tr::kThreads*Tr::kN-1)/(Tr::kThreads*Tr::kN)); s.groups_of_row=int((p.D+32*Tr::kN-1)/(32*Tr::kN)); int64_t n=p.S*s.chunks*K*p.D; s.start=scratch; s.end=scratch+n; s.slope=scratch+2*n;
  launch(shoot_kernel<Tr>,unsigned(p.S*s.chunks*s.blocks_of_row),Tr::kThreads,Tr::Steps::kBytes,false,p,s); launch(settle_kernel<Ts>,unsigned(p.S*s.groups_of_row),Ts::kThreads,Ts::Steps::kBytes,pdl,p,s); }
__global__ void sum_rows(const float* partial,int64_t rows,int64_t count,float* out){ __shared__ float sh[8][32]; int64_t i=blockIdx.x*32ll+threadIdx.x%32; float s=0; if(i<count) for(int64_t r=threadIdx.x/32;r<rows;r+=8) s+=partial[r*count+i]; sh[threadIdx.x/32][threadIdx.x%32]=s; __syncthreads(); if(threadIdx.x<32&&i<count){ s=0; for(int w=0;w<8;++w) s+=sh[w][threadIdx.x]; out[i]=s; } }
template<class E,int Th,int St,int Gr> static void run_lwalk(const typename E::Params& p,int64_t S,float* partial,float* out){ int rows=int((p.D+Th*E::kN-1)/(Th*E::kN)); using R=Ring<typename E::Word,E::kRows,St,Gr,Th>; launch(linear_walk_kernel<E,Th,St,Gr>,unsigned(S*rows),Th,R::kBytes,false,p,rows,partial); if(E::kSums) sum_rows<<<unsigned((E::kSums*p.D+31)/32),256,0,st>>>(partial,S,E::kSums*p.D,out); }
template<class E,int W,int C> static void run_scan(const typename E::Params& p,int64_t S,float* scratch,float* out){ using T=Tile<E,W,C>; Scan s{}; s.tiles=int((p.T+T::kLength-1)/T::kLength); s.groups_of_row=int((p.D+T::kChannels-1)/T::kChannels); s.columns=S*s.groups_of_row; int64_t groups=(s.tiles+kTileGroup-1)/kTileGroup; s.ticket=(uint32_t*)scratch; s.maps=scratch+64; s.carries=s.maps+S*s.tiles*T::kMap*p.D; s.partial=s.carries+S*groups*T::K*p.D; CK(cudaMemsetAsync(scratch,0xff,(char*)s.partial-(char*)scratch,st)); 
  unsigned grid=unsigned(std::min<int64_t>(s.columns*s.tiles,264)); launch(scan_kernel<E,W,C>,grid,32*W,sizeof(typename T::Shared),false,p,s); if(E::kSums) sum_rows<<<unsigned((E::kSums*p.D+31)/32),256,0,st>>>(s.partial,S*s.tiles,E::kSums*p.D,out); }
struct Shape{int64_t B,T,D;};
template<class Cell,class IO> struct Problem { ForwardParams f{}; BackwardParams b{}; int64_t n;
  Problem(Shape s,bool masks=false,bool state=false){ auto [B,T,D]=s; n=B*T*D; constexpr int K=Cell::kStates; SequenceParams q{}; q.S=B;q.D=D;q.T=T; q.x=get(n*3*sizeof(IO)); q.x_batch=T*3*D; q.x_time=3*D; q.x_gate=D; q.weight=get(Cell::kWeights*D*4); q.V=K-1;
    if(masks){ uint8_t* m=(uint8_t*)get(B*T),*h=(uint8_t*)get(B*T); std::vector<uint8_t> a(B*T),c(B*T); for(auto&v:a) v=rand()%37==0; for(auto&v:c) v=rand()%11==0; cudaMemcpy(m,a.data(),B*T,cudaMemcpyHostToDevice); cudaMemcpy(h,c.data(),B*T,cudaMemcpyHostToDevice); q.reset=m; q.hold=h; q.V=K; }
    if(state){ float* i=(float*)get(K*B*D*4); uniform<<<512,256>>>(i,K*B*D,-1.f,1.f,77); q.initial=i; }
    (SequenceParams&)f=q; (SequenceParams&)b=q; f.h=get(n*sizeof(IO)); f.last=get(K*B*D*4); f.saved=q.V?get(n*q.V*sizeof(IO)):nullptr; f.report=(float*)get(12); f.tol=-1;
    b.dh=get(n*sizeof(IO)); b.h=f.h; b.saved=f.saved; b.dx=get(n*3*sizeof(IO)); b.dweight=get(Cell::kWeights*D*4); b.dstate=get(K*B*D*4); b.dlast=nullptr; if(state) b.dlast=q.initial; fill<<<2048,256>>>((IO*)b.dh,n,1.f,5); regime("half"); }
  void regime(std::string r){ float sx=1; IO* x=(IO*)f.x; float* w=(float*)f.weight; int64_t nw=Cell::kWeights*f.D; constexpr bool gru=Cell::kStates==1; float big=-1; 
    if(r=="init") fill<<<64,256>>>(w,nw,1.f/sqrtf(f.D),3); else if(r=="half"||r=="half3"||r=="long") uniform<<<64,256>>>(w,nw,-.5f,.5f,3); else if(r=="nine3") uniform<<<64,256>>>(w,nw,-.9f,.9f,3); else if(r=="free2"||r=="parity") fill<<<64,256>>>(w,nw,2.f,3);
    if(r=="half3"||r=="nine3") sx=3; if(r=="free2") sx=2; fill<<<2048,256>>>(x,n*3,sx,4); if(r=="long") shift<<<2048,256>>>(x,n*3,(int)f.D,0,gru?-3.5f:3.5f); (void)big; CK(cudaDeviceSynchronize()); }
  void poison(){ cudaMemset(f.h,0xff,n*sizeof(IO)); if(f.saved) cudaMemset(f.saved,0xff,n*f.V*sizeof(IO)); cudaMemset(f.last,0xff,Cell::kStates*f.S*f.D*4); cudaMemset(b.dx,0xff,n*3*sizeof(IO)); cudaMemset(b.dweight,0xff,Cell::kWeights*f.D*4); cudaMemset(b.dstate,0xff,Cell::kStates*f.S*f.D*4); }
};
}
