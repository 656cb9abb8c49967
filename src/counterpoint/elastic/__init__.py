"""A worker's side of a job: a module whose parameters lie on servers, data by portions, the loop that takes both."""
