mkdir -p /tmp/cublas; for f in $(find / -name 'libcublas.so*' -not -path '/proc/*' 2>/dev/null | head -3); do ln -sf $f /tmp/cublas/libcublas.so; done
export CUDA_LIB=/tmp/cublas TORCH_EXTENSIONS_DIR=/tmp/ext CONSTRINT_CACHE_DIR=/tmp/constrint PYTHONPATH=$PWD/bench_harness/flashrnn:$PYTHONPATH
