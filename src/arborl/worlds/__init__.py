"""Small worlds that come with the package: a model and its scorer each."""
