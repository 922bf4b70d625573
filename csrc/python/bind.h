#pragma once

#include <pybind11/pybind11.h>

#include <string>

namespace py = pybind11;

// See bind.cpp. Raises ValueError for an op whose schema has a type that is not supported.
py::object bind(const std::string &name, py::object otherwise);
