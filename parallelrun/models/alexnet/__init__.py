"""AlexNet (Krizhevsky 2014, 'One weird trick', one column)."""
