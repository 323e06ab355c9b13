"""Results: the curve's schema, the fits, the files and the figures."""
