#include "cluster.cuh"
using namespace flashcell; using namespace flashcell::cuda;
template __global__ void flashcell::cuda::cluster_kernel<ClusterForward<Lstm,bf16,256,2,false>,ForwardParams>(const __grid_constant__ ForwardParams);
template __global__ void flashcell::cuda::cluster_kernel<ClusterForward<Lstm,bf16,256,1,false>,ForwardParams>(const __grid_constant__ ForwardParams);
template __global__ void flashcell::cuda::cluster_kernel<ClusterForward<Slstm,bf16,512,2,true>,ForwardParams>(const __grid_constant__ ForwardParams);
template __global__ void flashcell::cuda::cluster_kernel<ClusterBackward<Lstm,bf16,256,2,false>,BackwardParams>(const __grid_constant__ BackwardParams);
template __global__ void flashcell::cuda::cluster_kernel<ClusterBackward<Lstm,bf16,256,1,false>,BackwardParams>(const __grid_constant__ BackwardParams);
template __global__ void flashcell::cuda::cluster_kernel<ClusterBackward<Slstm,bf16,512,2,true>,BackwardParams>(const __grid_constant__ BackwardParams);
