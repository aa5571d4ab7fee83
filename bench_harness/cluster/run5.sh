cd "$(dirname "$0")"
N="nvcc -gencode=arch=compute_90a,code=sm_90a -O3 -std=c++20 -diag-suppress 177"
for c in Lstm Gru Slstm RnnTanh; do $N -Isrc/cuda -Isrc -DCELLS=$c -o b_$c bench.cu > $c.log 2>&1 & done
for v in b c; do $N -Isrc_$v/cuda -Isrc_$v -Xptxas -v -DCELLS=Lstm -o b_v$v bench.cu > v$v.log 2>&1 & done
wait; date; grep -h "error" *.log; grep -h "spill" vc.log | grep -v " 0 bytes spill st" | sort | uniq -c
for c in Lstm Gru Slstm RnnTanh; do timeout 40 ./b_$c more > v_$c; echo "$c rc $? $(wc -l < v_$c) same $(grep -c 'same bits' v_$c) nan $(grep -ci nan v_$c)"; grep options v_$c | sort | uniq | cut -c9-70 | tr '\n' ';'; awk '!/options/{printf "%s %s %s h %s last %s dx %s dr %s ds %s db %s;", $2,$3,$5,$9,$11,$15,$17,$19,$21} END {print ""}' v_$c | head -c 700; echo; done
for v in Lstm vb vc Lstm vb vc; do echo $v; timeout 30 ./b_$v time 16 1024 3 256 64 1024 3 256; done
./b_vc check | grep -c "same bits"
date
