"""The shared module: everything the ten methods do alike."""


class UserError(Exception):
    """A mistake the user can mend: one sentence saying what, where and how. Commands print it and exit with code 2."""
