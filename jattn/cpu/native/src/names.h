// Names of functions of one instruction set, whose name the compiler is given.
#pragma once

#define NAME2(prefix, x) prefix##x
#define NAME1(prefix, x) NAME2(prefix, x)
#define NAME(prefix) NAME1(prefix, INSTRUCTION_SET)
#define TEXT2(x) #x
#define TEXT(x) TEXT2(x)
