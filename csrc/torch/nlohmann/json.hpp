// What PyTorch's ATen/functorch/Interpreter.h needs to be parsed: it includes this header of another library, which
// PyTorch does not bring along, for two functions that nothing here calls. So nothing here is defined either.
#pragma once

#include <string>

namespace nlohmann
{

struct json {
    json();
    template <typename T>
    explicit json(const T &value);
    std::string dump() const;
    static json parse(const std::string &text);
    template <typename T>
    T get() const;
};

} // namespace nlohmann
