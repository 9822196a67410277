"""Sites inside the training frameworks that people run. Each module is thin and needs its framework only when imported.

| module | what it has |
|---|---|
| `weightgrad.integrations.transformers` | `WeightGradCallback` for the Hugging Face `Trainer` |
| `weightgrad.integrations.lightning` | `WeightGradCallback` for the Lightning `Trainer` |
| `weightgrad.integrations.accelerate` | `prepare` for what an `Accelerator` has prepared |
| `weightgrad.integrations.ray` | `site_trainer`: a site as a Ray Train job |
| `weightgrad.integrations.trackers` | `site.track(...)`: TensorBoard, Weights & Biases, MLflow |
"""
