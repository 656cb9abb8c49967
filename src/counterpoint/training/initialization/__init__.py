"""Parameters of models on torch's meta device: from initializers or files directly into what each rank keeps."""
