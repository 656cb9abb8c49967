"""Systems that start ranks: one launch specification, rendered as the commands, scripts and manifests of each system.

``spec.py`` is the specification; ``commands.py`` renders local runs, torchrun, mpirun and Slurm, ``kubernetes.py``
manifests; ``ray.py`` starts ranks as Ray actors; ``registry.py`` lists all systems.
"""
