// Which instruction-set units this processor can run.
#pragma once
#include <string>
#include <vector>

#include "kernels.h"

namespace lean {

// Every unit in this build, fastest last, whether or not this processor can run it.
std::vector<std::string> compiled_isas();

// The units that this processor lists, that the operating system saves registers for, and that have just
// computed a small product without fault and with the portable unit's result; fastest last.
const std::vector<const KernelTable*>& available_tables();

}  // namespace lean
