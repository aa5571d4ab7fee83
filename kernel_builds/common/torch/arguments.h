// Reads the argument names of an op from its schema.
#pragma once
#include <string>
#include <string_view>
#include <vector>

namespace flashcell {

struct Argument {
  std::string name;
  bool is_changed;
};

// Parses for example "_fwd(Tensor x, Tensor(a!)? c, int count=0) -> Tensor", with any op name.
inline std::vector<Argument> arguments_of(std::string_view schema) {
  std::vector<Argument> arguments;
  schema.remove_prefix(schema.find('(') + 1);
  for (bool is_last = false; !is_last;) {
    size_t end = 0;
    for (int depth = 0; depth > 0 || (schema[end] != ',' && schema[end] != ')'); ++end) {
      depth += (schema[end] == '(') - (schema[end] == ')');
    }
    std::string_view text = schema.substr(0, end);
    const bool is_changed = text.find('!') != text.npos;
    text = text.substr(0, text.find('='));
    arguments.push_back({std::string(text.substr(text.rfind(' ') + 1)), is_changed});
    is_last = schema[end] == ')';
    schema.remove_prefix(end + 1);
  }
  return arguments;
}

}  // namespace flashcell
