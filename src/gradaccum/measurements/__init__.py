"""What is measured, one module a stage: `Config`, and `measure(config, setup, progress) -> Outcome`.

A measurement does no input or output. Its module imports no torch until it measures, so that every section of
params.yaml can be validated at once.
"""
