"""Pipeline schedules: in which order a stage runs forwards and backwards of its microbatches."""
