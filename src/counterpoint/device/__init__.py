"""The interface to the device that ranks compute on; no other package names a kind of device."""
