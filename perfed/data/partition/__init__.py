"""Labels to indices per client: by shards, by tables of counts, by Dirichlet draws."""
