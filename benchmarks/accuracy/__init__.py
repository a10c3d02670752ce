"""How far forecasts are off: published runs, forecast from the models and strategies that their authors state."""
