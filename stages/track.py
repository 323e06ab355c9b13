"""Last: makes MLflow agree with the working folder, whatever DVC ran or found cached."""

from _start import user_errors  # first: it decides whose code is run  # isort: split
from gradaccum.tracking.track import track

if __name__ == "__main__":
    with user_errors():
        track()
