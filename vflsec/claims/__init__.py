"""Studies: claims of papers as settings, registered before they are tested. One TOML file each."""
