"""Independent looks at sealed data: contamination between what trains and what is held out."""
