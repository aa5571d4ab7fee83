#include "cuda_runtime.h"
#include "src/csrc/cuda/launch_cell.cuh"
#include <vector>
#include <cstdio>
#include <algorithm>
namespace flashcell::cuda {
static unsigned rs=1; static float U(){ rs=rs*1664525u+1013904223u; return (rs>>8)*(1.f/16777216.f); } static float G(){ return (U()+U()+U()+U()-2)*1.7f; }
template<class IO> std::vector<IO> vec(size_t n,bool nan=false,float sc=1){ std::vector<IO> v(n); for(auto&x:v) x=from_float<IO>(nan?NAN:sc*G()); return v; }
static int bad=0,checks=0; static const char* what="";
template<class IO> static double cmp(const char* n,const std::vector<IO>& a,const std::vector<double>& b,double tol,std::string tag){ double m=0; for(size_t i=0;i<b.size();++i){ double d=std::fabs(to_float(a[i])-b[i]); if(!(d<=m)) m=d!=d?1e30:d; } ++checks; if(m>tol){ ++bad; printf("BAD %s %s %s err %g\n",what,n,tag.c_str(),m);} return m; }
template<class Cell,class IO> void cell(int B,int T,int D,bool masks,int table,bool state,bool paired){ constexpr int K=Cell::kStates,P=Cell::kWeights; // table 0 none 1 lengths 2 cu_seqlens(B=1)
 std::string tag=std::string(Cell::kName)+" io"+std::to_string(sizeof(IO))+(std::is_same_v<IO,fp16>?"h":"")+" B"+std::to_string(B)+" T"+std::to_string(T)+" D"+std::to_string(D)+(masks?" masks":"")+" table"+std::to_string(table)+(state?" state":"")+(paired?" paired":"");
 std::vector<Sequence> seqs; int S=B; if(table==1){ for(int b=0;b<B;++b){ int L=b==0?T:(b*7)%(T+1); seqs.push_back({b,b*T,int64_t(b)*T*3*D,L,T-L}); } std::stable_sort(seqs.begin(),seqs.end(),[](auto&a,auto&b){return a.length>b.length;}); }
 if(table==2){ std::vector<int> cu={0,T/3,T/3,T/2,T}; S=4; for(int s=0;s<S;++s) seqs.push_back({s,cu[s],int64_t(cu[s])*3*D,cu[s+1]-cu[s],0}); std::stable_sort(seqs.begin(),seqs.end(),[](auto&a,auto&b){return a.length>b.length;}); }
 auto x=vec<IO>(size_t(B)*T*3*D); auto w=vec<float>(P*D,false,.4f); auto init=vec<float>(K*S*D,false,.5f); auto dh=vec<IO>(size_t(B)*T*D); auto dlast=vec<float>(K*S*D);
 std::vector<uint8_t> reset(B*T),hold(B*T); for(auto&r:reset) r=U()<.06f; for(auto&r:hold) r=U()<.1f;
 SequenceParams q{}; q.S=S;q.D=D;q.T=T;q.sequences=table?seqs.data():nullptr; if(masks) q.reset=reset.data(),q.hold=hold.data(); q.x=x.data();q.x_batch=int64_t(T)*3*D;q.x_time=3*D;q.x_gate=D;q.weight=w.data();q.initial=state?init.data():nullptr;q.V=K-1+masks;
 std::vector<Sequence> all=seqs; if(!table) for(int b=0;b<B;++b) all.push_back({b,b*T,int64_t(b)*T*3*D,T,0});
 // reference forward (double), saved rounded to IO for the backward
 size_t rows=size_t(B)*T; std::vector<double> h(rows*D,0),last(K*S*D); std::vector<double> sv(rows*q.V*D,0);
 for(auto&s:all) for(int d=0;d<D;++d){ double W[P],st[K]; for(int i=0;i<P;++i) W[i]=w[i*D+d]; for(int k=0;k<K;++k) st[k]=state?init[(k*S+s.index)*D+d]:0; for(int t=0;t<s.length;++t){ int64_t r=s.row+t; if(masks&&reset[r]) for(auto&v:st) v=0; bool hd=masks&&hold[r]; double X[3],N[K]; for(int g=0;g<3;++g) X[g]=to_float(x[s.x_offset+t*q.x_time+g*D+d]); Cell::forward(X,W,st,N); if(!hd) for(int k=0;k<K;++k) st[k]=N[k]; h[r*D+d]=hd?0:st[0]; for(int v=0;v<q.V;++v) sv[(r*q.V+v)*D+d]=st[v+1<K?v+1:0]; } for(int k=0;k<K;++k) last[(k*S+s.index)*D+d]=st[k]; }
 Launch to{{90,4},nullptr,std::is_same_v<IO,float>?Dtype::kFloat:std::is_same_v<IO,bf16>?Dtype::kBFloat16:Dtype::kHalf,paired,nullptr}; double tol=sizeof(IO)==4?3e-6:std::is_same_v<IO,fp16>?6e-4:6e-3;
 std::vector<IO> hs,ss;
 for(Method m:{Method::kWalk,Method::kShoot,Method::kNewton}) for(int it:{-1,1}){ if(it==1&&m==Method::kWalk) continue; what=m==Method::kWalk?"walk":m==Method::kShoot?"shoot":it==1?"newton1":"newton"; ForwardParams p{}; (SequenceParams&)p=q; p.method=m; auto ho=vec<IO>(rows*D,true); auto lo=vec<float>(K*S*D,true); auto so=vec<IO>(rows*q.V*D,true); float rep[3]={NAN,NAN,NAN}; p.h=ho.data();p.last=lo.data();p.saved=q.V?so.data():nullptr;p.report=rep;p.tol=-1;p.max_iters=it; std::vector<char> sc(Engine<Cell>::forward_scratch(p,to)+64,-1); to.scratch=sc.data(); Engine<Cell>::forward(p,to); cmp("h",ho,h,tol,tag); cmp("last",lo,last,tol,tag); cmp("saved",so,sv,tol,tag); if(!(rep[0]>=0&&rep[1]>=0&&rep[2]>=0)){++bad;printf("BAD report %g %g %g %s %s\n",rep[0],rep[1],rep[2],what,tag.c_str());} if(m==Method::kWalk){hs=ho;ss=so;} }
 // backward
 std::vector<double> dx(rows*3*D,0),dw(P*D,0),ds(K*S*D); for(auto&s:all) for(int d=0;d<D;++d){ double W[P],c[K],sum[P]={}; for(int i=0;i<P;++i) W[i]=w[i*D+d]; for(int k=0;k<K;++k) c[k]=state?dlast[(k*S+s.index)*D+d]:0; for(int t=s.length-1;t>=0;--t){ int64_t r=s.row+t; bool rs_=masks&&reset[r],hd=masks&&hold[r]; double X[3],st[K],g[3]={}; for(int j=0;j<3;++j) X[j]=to_float(x[s.x_offset+t*q.x_time+j*D+d]); for(int k=0;k<K;++k){ if(rs_) st[k]=0; else if(t==0) st[k]=state?init[(k*S+s.index)*D+d]:0; else if(k==0&&!masks) st[k]=to_float(hs[(r-1)*D+d]); else st[k]=to_float(ss[((r-1)*q.V+(k==0?K-1:k-1))*D+d]); } if(!hd){ c[0]+=to_float(dh[r*D+d]); Cell::backward(X,W,st,c,g,sum);} if(rs_) for(auto&v:c) v=0; for(int j=0;j<3;++j) dx[(r*3+j)*D+d]=g[j]; } for(int i=0;i<P;++i) dw[i*D+d]+=sum[i]; for(int k=0;k<K;++k) ds[(k*S+s.index)*D+d]=c[k]; }
 for(int walks=0;walks<3;++walks){ Way way=walks==0?Way::kScan:walks==1?Way::kWalk:Way::kReach; what=walks==1?"bwd walk":walks==2?"bwd reach":"bwd scan"; BackwardParams p{}; (SequenceParams&)p=q; p.dh=dh.data();p.dlast=state?dlast.data():nullptr;p.h=hs.data();p.saved=ss.data(); auto dxo=vec<IO>(rows*3*D,true); auto dwo=vec<float>(P*D,true); auto dso=vec<float>(K*S*D,true); p.dx=dxo.data();p.dweight=dwo.data();p.dstate=dso.data();
  for_lanes(p,to,[&](auto io,auto ch,auto mk){ using R=Backwards<Cell,decltype(io),decltype(ch)::value,decltype(mk)::value>; std::vector<char> sc(R::scratch(S,T,D,way)+64,-1); to.scratch=sc.data(); R::run(p,S,way,to,dwo.data()); if(walks==2){ auto q=R::reach_of(S,T,D,R::scan_of(S,T,D,sc.data())); printf("reach chunks %d open %d %s\n",q.chunks,*q.open,tag.c_str()); } });
  if(walks==2){ static int open; (void)open; } double tb=sizeof(IO)==4?2e-5:std::is_same_v<IO,fp16>?1e-2:6e-2; cmp("dx",dxo,dx,tb,tag); cmp("dw",dwo,dw,tb*3,tag); cmp("ds",dso,ds,tb,tag); } }
}
int main(){ using namespace flashcell; using namespace flashcell::cuda; setvbuf(stdout,0,_IONBF,0);
 for(int m=0;m<2;++m) for(int tb=0;tb<2;++tb){ cell<FlashGru,float>(2,75,33,m,tb,true,false); cell<FlashLstm,float>(2,75,33,m,tb,true,false); cell<FlashGru,bf16>(2,41,34,m,tb,true,true); cell<FlashLstm,bf16>(2,41,70,m,tb,false,true); cell<FlashGru,fp16>(2,41,5,m,tb,true,false); cell<FlashLstm,bf16>(2,41,7,m,tb,true,false);} 
 for(int m=0;m<2;++m){ cell<FlashGru,float>(1,200,40,m,2,true,false); cell<FlashLstm,fp16>(1,130,66,m,2,true,true); }
 cell<FlashGru,float>(3,1,8,false,0,true,false); cell<FlashLstm,bf16>(3,1,8,true,0,true,true); cell<FlashGru,float>(2,0,8,false,0,true,false); cell<FlashLstm,float>(1,1100,3,false,0,true,false); cell<FlashGru,bf16>(1,8,1,false,0,true,false); cell<FlashGru,float>(1,64,130,false,0,false,false);
 printf("checks %d bad %d\n",checks,bad); return bad; }
