"""What a deployment is made of: the study and its Flower app, the server's files, keys, and a page for every site."""
