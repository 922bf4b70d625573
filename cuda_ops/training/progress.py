"""The progress bar of a training command."""

import contextlib


def progress(console, run):
    """A progress bar over the steps of all backends, as a context manager that gives what moves it on.

    Args:
        console: rich's.
        run: has `backends`, each with its `name` and `losses`, and `steps_planned` for each of them.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    @contextlib.contextmanager
    def bar():
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"))
        with Progress(*columns, TimeRemainingColumn(), console=console, disable=console.quiet) as progress:
            task = progress.add_task("training", total=run.steps_planned * len(run.backends))

            def advance(run):
                losses = ", ".join(f"{b.name} {b.losses[-1]:.4f}" for b in run.backends.values() if b.losses)
                done = sum(len(b.losses) for b in run.backends.values())
                progress.update(task, completed=done, description=f"loss {losses}")

            yield advance

    return bar()
