N="nvcc -gencode=arch=compute_90a,code=sm_90a -O3 -std=c++20 -Isrc/cuda -Isrc -diag-suppress 177"
cd "$(dirname "$0")"
for c in ${CELLSET:-Lstm Gru Slstm RnnTanh RnnRelu}; do $N -DCELLS=$c -o b_$c bench.cu > $c.log 2>&1 & done
[ -n "$CHIP" ] && $N -DWITH_CHIP -o b_chip bench.cu > chip.log 2>&1 &
wait; grep -h error *.log | head -5; ls b_* 
