"""Ctrl-C while `python -m cuda_ops` imports what it needs, PyTorch above all: seconds in which there is nothing to
clean up, and in which a KeyboardInterrupt would surface as the traceback of whichever import it hit."""

import os
import re
import signal
import sys
import threading

INTERRUPTED = 130
"""What shells call the exit status of a command that SIGINT has ended."""


def end_quietly_while_a_command_is_imported():
    """In `python -m cuda_ops`, where the package is imported before __main__ is: makes SIGINT end the process at once.
    Nothing in a program that imports cuda_ops, or where SIGINT is ignored (`nohup`) or handled already."""
    # While Python looks for what -m names, argv[0] is "-m"; the name itself stands in front of the other arguments.
    if sys.argv[:1] != ["-m"] or not re.fullmatch(r"(-\w*m)?cuda_ops", sys.orig_argv[-len(sys.argv)]):
        return
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def raise_again():
    """From here on SIGINT is a KeyboardInterrupt, if it was the above that changed it."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number, frame):
    # No exception, which somebody's `except` or `__del__` could swallow.
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)


class Interruption:
    """Records Ctrl-C, so that a step in progress is finished before the run ends; a second one ends it at once."""

    def __init__(self, patient: bool = False):
        """`patient`: a second one does nothing. torchrun passes on the Ctrl-C that its processes have got already."""
        self.patient = patient
        self.noted = False

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *exception):
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._before)

    def _note(self, number, frame):
        if self.noted and not self.patient:
            raise KeyboardInterrupt
        self.noted = True

    def __call__(self) -> bool:
        return self.noted
