"""What is trained: model, data and objective, one module a workload."""
