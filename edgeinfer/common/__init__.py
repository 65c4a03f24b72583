"""What every other module may use: errors, shapes, settings, sizes, arguments, files, devices."""
