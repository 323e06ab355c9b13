"""Joins the curves, draws the figures, writes the recipe."""

from _start import user_errors  # first: it decides whose code is run  # isort: split
from gradaccum.results.report import Measured, write_report

if __name__ == "__main__":
    with user_errors():
        print("wrote " + ", ".join(map(str, write_report(Measured.read()))))
