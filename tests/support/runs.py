"""Commands as processes of their own."""

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def environment():
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "100"}


def interrupted(module, trainer, arguments, steps):
    """(exit status, output) of `python -m cuda_ops`, which gets a real SIGINT when `trainer.step`, of a class in the
    module cuda_ops.training.<module>, has begun so many steps."""
    tell = (
        f"import sys; from cuda_ops.training.{module} import {trainer} as trainer; step = trainer.step\n"
        "def told(*a, **k):\n    print('step', file=sys.stderr, flush=True); return step(*a, **k)\n"
        "trainer.step = told\n"
        "from cuda_ops.__main__ import main; sys.exit(main())"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", tell, *arguments],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        begun = 0
        for line in process.stderr:
            begun += line == "step\n"
            if begun == steps:
                process.send_signal(signal.SIGINT)
                break
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, output
