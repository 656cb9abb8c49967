"""The device that ranks compute on, behind one interface; the only package that knows a certain kind of device."""
