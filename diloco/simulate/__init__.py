"""What a link allows: compute utilisation, bytes, and the way of reducing that pays, before any machine is rented."""
