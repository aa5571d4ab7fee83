"""Runs a module of these folders: `python scripts tooling.demo --help`.

Python puts this folder first on its search path then, as it does for the commands beside this file,
so that a module finds the others (`from measurement import record`) whichever way it is started.
"""

import runpy
import sys

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        raise SystemExit("usage: python scripts MODULE [arguments]")
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
