"""The strategy of Lightning Fabric."""
