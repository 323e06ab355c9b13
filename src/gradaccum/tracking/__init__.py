"""Tracking: where the MLflow store is, one stage's live run, agreement of MLflow with dvc.lock.

Importing this package imports neither mlflow nor torch. It sets what MLflow reads when it is first imported, unless
the user has set it: no telemetry, no links printed (they may hold credentials), and patience of seconds, not minutes.
"""

import os

_MLFLOW_DEFAULTS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "8",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
}

for _name, _value in _MLFLOW_DEFAULTS.items():
    os.environ.setdefault(_name, _value)
