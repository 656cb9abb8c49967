"""Built-in training jobs of `counterpoint train NAME`: real data, a model, and a target metric."""
