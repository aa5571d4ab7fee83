#!/usr/bin/env python3
"""The programs nvcc and fatbinary of a toolkit whose ptxas knows GPUs that its nvcc does not, and whose
fatbinary compresses as its nvcc cannot ask.

nvcc 12.4 ends at 9.0; ptxas 12.8 compiles its PTX for 9.0 to machine code for 10.0 and 12.0, as a
driver would when the PTX is first used. This file stands in the toolkit's bin/ under both names. As
nvcc it asks the compiler for PTX for 9.0 in place of machine code for 10.0 and 12.0; as fatbinary,
which nvcc calls with the files that go into an object, it puts machine code in that PTX's place, and
asks for the smallest result: four fifths of what -compress-all leaves.
"""

import os
import re
import subprocess
import sys

BIN = os.path.dirname(os.path.abspath(__file__))
REAL = {"nvcc": "nvcc-12.4", "fatbinary": "fatbinary-13.0"}  # what these programs are called
LATER = ("100", "120")
PTX_90 = "-gencode=arch=compute_90,code=compute_90"
VARIABLE = "FLASHCELL_LATER_GPUS"  # from nvcc to the fatbinary that it calls


def nvcc(words):
    """Returns nvcc's command, and for which later GPUs fatbinary makes machine code."""
    own = {f"-gencode=arch=compute_{gpu},code=sm_{gpu}": gpu for gpu in LATER}
    later = [own[word] for word in words if word in own]
    kept = [word for word in words if word not in own]
    if later and PTX_90 in kept:
        sys.exit("nvcc: PTX for 9.0 cannot be kept beside machine code for 10.0 and 12.0")
    return [os.path.join(BIN, REAL["nvcc"]), *kept, *[PTX_90] * bool(later)], later


def fatbinary(words, later):
    """Makes code for the `later` GPUs and runs fatbinary with it; returns its exit status."""
    command, made = [os.path.join(BIN, REAL["fatbinary"]), "--compress-mode=size"], []
    try:
        for word in words:
            ptx = re.fullmatch(r"--image3=kind=ptx,sm=90,file=(.+)", word)
            if ptx is None or not later:
                command.append(word)
                continue
            for gpu in later:
                made.append(f"{ptx[1]}.sm_{gpu}.cubin")
                compiler = [
                    os.path.join(BIN, "ptxas"),
                    f"-arch=sm_{gpu}",
                    "-m64",
                    ptx[1],
                    "-o",
                    made[-1],
                ]
                if status := subprocess.call(compiler):
                    return status
                command.append(f"--image3=kind=elf,sm={gpu},file={made[-1]}")
        return subprocess.call(command)
    finally:
        for file in made:
            if os.path.exists(file):
                os.remove(file)


def main():
    if os.path.basename(sys.argv[0]) == "fatbinary":
        sys.exit(fatbinary(sys.argv[1:], os.environ.get(VARIABLE, "").split()))
    command, later = nvcc(sys.argv[1:])
    os.environ[VARIABLE] = " ".join(later)
    if "--list-gpu-code" in sys.argv:
        print("\n".join(f"sm_{gpu}" for gpu in LATER), flush=True)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
