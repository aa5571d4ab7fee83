#include "cuda_runtime.h"
#include <ucontext.h>
#include <vector>
Dim threadIdx,blockIdx,gridDim,blockDim;
namespace flashcell::cuda { alignas(64) unsigned char shared[1<<18], memory[1<<18]; }
struct Fiber { ucontext_t c; std::vector<char> stack; bool done; };
static std::vector<Fiber> fibers; static ucontext_t mainc; static int cur; static const std::function<void()>* job;
static void yield(){ int me=cur; swapcontext(&fibers[me].c,&mainc); threadIdx.x=me; }
static void entry(){ (*job)(); fibers[cur].done=true; swapcontext(&fibers[cur].c,&mainc); }
struct Bar { int arrived=0; unsigned gen=0; }; static Bar block_bar; static std::vector<Bar> warp_bar; static int alive;
static std::vector<int> alive_warp;
static void wait(Bar& b,int n){ unsigned g=b.gen; if(++b.arrived==n){ b.arrived=0; ++b.gen; } else while(b.gen==g) yield(); }
void __syncthreads(){ wait(block_bar,alive); }
static int orv[2]; static unsigned orphase=0;
int __syncthreads_or(int p){ static int acc; wait(block_bar,alive); if(threadIdx.x==0) acc=0; wait(block_bar,alive); acc|=p!=0; wait(block_bar,alive); int r=acc; wait(block_bar,alive); return r; }
static int wn(int w){ return alive_warp[w]; }
void __syncwarp(){ int w=threadIdx.x/32; wait(warp_bar[w],wn(w)); }
static uint32_t ex[64][32];
unsigned __ballot_sync(unsigned,int p){ int w=threadIdx.x/32,l=threadIdx.x%32; ex[w][l]=p!=0; __syncwarp(); unsigned m=0; for(int i=0;i<32;++i) m|=ex[w][i]<<i; __syncwarp(); return m; }
int __any_sync(unsigned m,int p){ return __ballot_sync(m,p)!=0; }
float __shfl_xor_sync(unsigned,float v,int d){ int w=threadIdx.x/32,l=threadIdx.x%32; memcpy(&ex[w][l],&v,4); __syncwarp(); float r; memcpy(&r,&ex[w][l^d],4); __syncwarp(); return r; }
void emulate(int64_t blocks,int threads,const std::function<void()>& body){ job=&body; gridDim.x=unsigned(blocks); blockDim.x=threads; if((int)fibers.size()<threads){ fibers.resize(threads); } for(auto&f:fibers) if(f.stack.empty()) f.stack.resize(128<<10);
 for(int64_t b=0;b<blocks;++b){ blockIdx.x=unsigned(b); alive=threads; warp_bar.assign(threads/32,{}); alive_warp.assign(threads/32,32); block_bar={}; for(int i=0;i<threads;++i){ auto&f=fibers[i]; f.done=false; getcontext(&f.c); f.c.uc_stack.ss_sp=f.stack.data(); f.c.uc_stack.ss_size=f.stack.size(); f.c.uc_link=nullptr; makecontext(&f.c,entry,0); }
  int left=threads; long spins=0; while(left){ for(int i=0;i<threads;++i) if(!fibers[i].done){ cur=i; threadIdx.x=i; swapcontext(&mainc,&fibers[i].c); if(fibers[i].done){ --left; --alive; --alive_warp[i/32]; if(alive&&block_bar.arrived==alive){block_bar.arrived=0;++block_bar.gen;} } } if(++spins>4000000){printf("hang block %ld\n",(long)b);abort();} } } }
