// Few rows whose numbers are multiplied as float32, of one instruction set: see kernel.cc.
#include "few.h"
#include "names.h"

namespace jattn_native {

void NAME(few_floats_)(const Problem& p, const Split& split, Queue& queue, int rows) {
  few<AsFloats>(p, split, queue, rows);
}

}  // namespace jattn_native
