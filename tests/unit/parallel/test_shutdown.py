"""How long a launcher lets its processes save: small ones, which only take their time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # torch's launcher is imported

# What is launched: it tells its launcher how it ended, as a rank does, `seconds` after SIGTERM.
SAVING = """
import os, signal, sys, time
from legato.parallel.reports import RankEnd, is_over, launch_folder, write_end

def stop(number, frame):
    time.sleep(float(os.environ["SAVING_SECONDS"]))
    write_end(launch_folder(), RankEnd(rank=0, how="stopped", time=0.0, exit_code=143))
    sys.exit(0)

if is_over(launch_folder()):
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
open(os.environ["READY"], "w").close()
time.sleep(60)
"""

LAUNCHER = """
import json, os, signal, sys, threading, time
from pathlib import Path
from torch.distributed.elastic.multiprocessing.api import PContext
from legato.parallel.launch import launch, plan_launch

# torch would kill after 30 seconds whatever it ends itself.
close = PContext.close
PContext.close = lambda self, death_sig=None, timeout=30: close(self, death_sig, min(timeout, 1))

def stop():
    while not os.path.exists(os.environ["READY"]):
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGTERM)

for timeout in sys.argv[1:]:
    plan = plan_launch([f"--shutdown-timeout={timeout}", "--max-restarts=1"], [])
    plan.arguments.training_script = "saving"
    threading.Thread(target=stop).start()
    began = time.monotonic()
    try:
        launch(plan, logs=Path("nowhere"))
    except BaseException as error:
        print(json.dumps([type(error).__name__, error.exit_code, time.monotonic() - began]))
    os.unlink(os.environ["READY"])
"""


def test_a_save_may_take_as_long_as_the_shutdown_timeout_and_is_killed_then(tmp_path: Path) -> None:
    (tmp_path / "saving.py").write_text(SAVING)
    paths = [str(tmp_path), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {
        "PYTHONPATH": os.pathsep.join(paths),
        "READY": str(tmp_path / "ready"),
        "SAVING_SECONDS": "3",
    }
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHER, "30", "1"],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    ends = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(name, code) for name, code, _ in ends] == [
        ("StopRequested", 143),
        ("CheckpointWriteError", 3),
    ], done.stderr
    assert ends[0][2] > 3
