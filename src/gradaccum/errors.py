"""Errors a user can act on: each message says what is wrong, why, and what to do."""


class GradaccumError(Exception):
    """Base of every error that this package raises for its user."""


class ConfigError(GradaccumError, ValueError):
    """A value that the user set cannot be right."""


class BatchError(GradaccumError, ValueError):
    """A batch or window that cannot be accumulated."""


class ClaimError(GradaccumError):
    """A measurement contradicts what its stage claims; the result files are written all the same."""


class StateError(GradaccumError, RuntimeError):
    """State was asked for, or given, at a time or in a shape that cannot continue a run."""


class RankError(GradaccumError, RuntimeError):
    """Another rank is gone, or cannot go on, so this one cannot either."""


class PreflightWarning(UserWarning):
    """Something that is right only under conditions which cannot be checked beforehand."""
