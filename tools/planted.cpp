// A torch symbol that no torch has, in a function that is never called: cross.py must find it missing.
namespace at::mps {
void planted();
}

void use_planted() { at::mps::planted(); }
