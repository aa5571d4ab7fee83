cd "$(dirname "$0")"
timeout 60 ./b_v6w check
for b in v6 v6w; do echo "== $b"; for s in "16 1 768" "32 1 768" "48 1 768" "64 1 768" "96 1 768" "128 1 768" "64 1 1024" "16 3 256" "64 3 256"; do timeout 25 ./b_$b time $s || echo "FAILED $b $s"; done; done
timeout 30 compute-sanitizer --tool synccheck ./b_v6w check1 2>&1 | tail -3
