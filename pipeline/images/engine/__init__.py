"""The command-line flags of the engines, as each image's own parser knows them."""
