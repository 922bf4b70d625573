"""An error that the user can fix."""


class UserError(ValueError):
    """Its message says in one line what is wrong and how to fix it; the commands print it alone and exit with 2."""
