"""What tests share: the oracle, samplers, and cases of models and files."""
