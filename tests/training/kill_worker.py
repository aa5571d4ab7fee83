"""Kills scripts/train at random moments: kill_worker.py FOLDER KILLS SEED.

The kills hit a run's work, not its imports, and go on until enough of them, of ten times as many
at most, found a checkpoint: on a busy machine the first ones may come too early. After each, the checkpoints must be complete, and
the run that is resumed to its end must have the whole run's curve and weights.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

from forked_runs import finish, results, start

from training.checkpoint import checkpoints_in, read_state
from training.manifest import find_damage


def check(checkpoints: Path) -> bool:
    """Checks the newest checkpoint and the one before; returns False if there is none yet."""
    found = checkpoints_in(checkpoints)[:2]
    for checkpoint in found:
        assert find_damage(checkpoint, ["process-0.pt"]) is None
        assert read_state(checkpoint / "process-0.pt")["progress"]["step"] == int(
            checkpoint.name[5:]
        )
    return bool(found)


def main() -> None:
    folder, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    longest = finish(folder, "whole")
    draw = random.Random(seed)
    checkpoints = folder / "broken/runs/tiny/checkpoints"
    seen = done = 0
    while done < kills or (seen <= kills // 4 and done < 10 * kills):
        process = start(folder, "broken", "--resume")
        time.sleep(draw.uniform(0, longest))
        os.kill(process, signal.SIGKILL)
        _, status = os.waitpid(process, 0)
        if os.WIFSIGNALED(status):
            done += 1
            seen += check(checkpoints)
        else:  # it had finished: that counts as no kill, and the next run starts anew
            assert os.WEXITSTATUS(status) == 0, (folder / "broken.txt").read_text()[-2000:]
            assert results(folder, "whole") == results(folder, "broken")
            finish(folder, "broken", "--restart", "--max-minutes", "0.0001")
    finish(folder, "broken", "--resume")
    assert results(folder, "whole") == results(folder, "broken")
    left = {path.name for path in checkpoints.parent.rglob("*") if path.name.startswith(".")}
    assert not left, left
    assert sorted(checkpoints.iterdir(), reverse=True) == checkpoints_in(checkpoints)
    print(f"{kills} kills or more: {done}, {seen} of them with a checkpoint to go on from")
    assert seen > kills // 4, "the kills came too early to mean anything"


if __name__ == "__main__":
    main()
