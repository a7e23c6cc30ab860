"""Looking at runs and models: what notebooks need besides training."""
