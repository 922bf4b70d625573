"""The error that a user can mend."""


class UserError(ValueError):
    """Its message says in one line what is wrong and how to mend it; the commands print it alone and exit with 2."""
