// Prints the instruction sets that this processor has as a list of CMake, which runs it to build for some of them.
#include <iostream>

#include "isas.h"

int main() {
  for (const std::string_view isa : native::supported_isas()) std::cout << isa << ';';
}
