"""Compiles flashrnn's fused kernels of the sweep, one process a shape. Usage: prebuild.py jobs limit_s"""
import subprocess, sys, time, itertools, os
one = '''
import sys, torch, flashrnn
cell, heads, width, batch = sys.argv[1], *map(int, sys.argv[2:5])
kind = "bfloat16"
c = flashrnn.FlashRNNConfig(function=cell, backend="cuda_fused", dtype=kind, num_heads=heads, head_dim=width, batch_size=batch,
  dtype_w=kind, dtype_r=kind, dtype_b=kind, input_shape="TBHDG", recurrent_shape="HDGP", bias_shape="HDG", output_shape="STBHD")
bf = dict(device="cuda", dtype=torch.bfloat16)
x = torch.randn(16, batch, heads, width, 4, **bf, requires_grad=True); w = torch.randn(heads, width, 4, width, **bf, requires_grad=True) * .02
b = torch.randn(heads, width, 4, **bf, requires_grad=True)
s, _ = flashrnn.flashrnn(x, w, b, config=c); s[0].sum().backward(); torch.cuda.synchronize()
'''
shapes = [(c, 768 // w, w, 16) for c in ("lstm", "slstm") for w in (768, 64, 256, 128, 32, 16)]
shapes += [(c, *s, b) for b in (2, 32, 64, 128, 256, 8, 4) for s in ((1, 768), (12, 64)) for c in ("lstm", "slstm")]
jobs, limit = int(sys.argv[1]), float(sys.argv[2])
begin, running, done = time.time(), {}, []
queue = list(shapes)
while (queue or running) and time.time() - begin < limit:
    while queue and len(running) < jobs:
        s = queue.pop(0)
        log = open(f"/tmp/fr_{'_'.join(map(str, s))}.log", "w")
        running[s] = (subprocess.Popen([sys.executable, "-c", one, *map(str, s)], stdout=log, stderr=log), time.time())
    for s, (p, t) in list(running.items()):
        if p.poll() is not None:
            done.append((s, p.returncode, round(time.time() - t)))
            del running[s]
    time.sleep(0.2)
for s, (p, _) in running.items(): p.kill()
print("built", [(*s, t) for s, rc, t in done if rc == 0])
print("failed", [s for s, rc, t in done if rc], "left", queue + list(running), f"{time.time() - begin:.0f} s")
